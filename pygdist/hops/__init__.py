"""One hop on one rank: what a layer reads and how it is run. Nothing here knows of another rank."""
