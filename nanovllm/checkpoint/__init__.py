"""Finds, downloads and converts model folders, and reads their files without trusting them."""
