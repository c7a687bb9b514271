"""The fleet's page: reads what a server keeps in its folder, and shows it. A process of its own: killing it changes nothing
in the run. :mod:`server.dashboard.fleet` is what is known, :mod:`server.dashboard.fold` how events become that,
:mod:`server.dashboard.app` what is served."""
