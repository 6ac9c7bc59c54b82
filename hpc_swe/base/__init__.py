"""Hold what every other room uses: records, the files they lie in, errors, and how text is shown."""
