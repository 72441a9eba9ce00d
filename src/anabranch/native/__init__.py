"""A decoder's layers in C++, compiled on first use by the machine's own compiler; see ``interface.cpp``."""
