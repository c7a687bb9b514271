"""From a graph to a program: partition, memory, instructions, bytes."""
