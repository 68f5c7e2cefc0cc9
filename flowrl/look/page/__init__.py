"""The page of `flowrl look`: a server on this machine, or one HTML file."""
