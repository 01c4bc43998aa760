"""Matrix products, one file per weight format."""
