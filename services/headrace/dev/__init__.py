"""What a checkout needs around the product: its environment, its generated pages.

`bootstrap` runs before anything is installed, so it imports the standard library only.
"""
