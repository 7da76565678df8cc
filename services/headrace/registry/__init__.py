"""The Registry: artifacts, revisions, aliases, and the routing snapshot compiled from them."""
