"""Worker processes: started, forked from a process that has already imported, and terminated with their children."""
