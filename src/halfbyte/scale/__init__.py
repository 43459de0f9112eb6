"""The work of convert, verify and calibrate on a Ray cluster. Ray is imported when a cluster is asked for."""
