"""One page out of result files: plots and tables, self-contained, and the tables of the README."""
