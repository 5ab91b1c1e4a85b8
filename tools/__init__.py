"""Programs that make what is kept in the repository; no part of the package that is installed."""
