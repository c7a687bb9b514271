"""The fleet's page: reads what a server keeps in its folder, and shows it. A process of its own: killing it changes nothing
in the run. :mod:`server.dashboard.known` reads, :mod:`server.dashboard.shown` makes tables and pages, and
:mod:`server.dashboard.web` serves them."""
