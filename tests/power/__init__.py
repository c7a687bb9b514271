"""Power cuts: what a process asked of its file system, and every state in which a cut could have left the disk."""
