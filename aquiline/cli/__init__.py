"""The command line. Flags and printing live here and nowhere else."""
