"""The fleet's page: reads what a server keeps in its folder, and shows it. A process of its own: killing it changes nothing
in the run. :mod:`edgefl_server.dashboard.known` reads, :mod:`edgefl_server.dashboard.shown` makes tables and pages, and
:mod:`edgefl_server.dashboard.web` serves them."""
