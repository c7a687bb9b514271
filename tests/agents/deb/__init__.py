"""The Debian package of the C++ agent, in a clean root of Debian."""
