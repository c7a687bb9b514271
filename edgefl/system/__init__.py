"""Services of the operating system and of Python: files, memory, processes, imports."""
