"""Looking at runs: metrics, live progress, the report page, recordings. Nothing here trains or simulates."""
