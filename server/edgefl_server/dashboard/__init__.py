"""Dashboard of a fleet: reads the folder of a run, and shows it. A process of its own, so that killing it changes nothing
in the run. :mod:`edgefl_server.dashboard.known` reads, :mod:`edgefl_server.dashboard.shown` makes tables and pages, and
:mod:`edgefl_server.dashboard.web` serves them."""
