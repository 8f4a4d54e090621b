"""The blocks of the cache: pools, tables of running requests, the prefix cache. Imports no torch."""
