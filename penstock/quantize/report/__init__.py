"""Show what a comparison of two models found: as a table, a document, and a page with plots."""
