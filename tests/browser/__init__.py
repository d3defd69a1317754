"""The pages in a browser: `make browser`."""
