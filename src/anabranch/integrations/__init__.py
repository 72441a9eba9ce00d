"""Use anabranch from other libraries, each of which is imported only by its own module."""
