"""A decoder's layers in C++, compiled for each instruction set when the wheel is built; see ``interface.cpp``."""
