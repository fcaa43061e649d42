"""`kvrelay up`: a whole cluster on one machine, started, watched and stopped by one process."""
