"""Results of the papers, run again with the programs that devices run: every number beside the one it should be."""
