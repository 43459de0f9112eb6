"""The numpy backend: the definition that every other backend equals bit for bit."""
