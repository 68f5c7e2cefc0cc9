"""Running a plan on Ray: places, hosts, the wire between them, and the executor. Ray is imported only here."""
