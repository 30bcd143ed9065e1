"""The course as a web site: static pages that need neither a kernel nor a server."""
