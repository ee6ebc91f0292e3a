"""Episodes, statistics and analysis."""
