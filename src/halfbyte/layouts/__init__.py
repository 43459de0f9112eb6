"""Where bytes sit: reorderings of codes and scales, no arithmetic."""
