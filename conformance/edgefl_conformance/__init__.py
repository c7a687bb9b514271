"""The conformance kit: it plays the server over a real broker against any device agent, and reports correct behavior.

It judges messages on the wire and exit codes alone. ``material`` has small bundles and the expected results of their rounds.
``play`` has the broker, the agent's process and the scripted server, ``cases`` the cases. ``vectors`` writes test data for
readers in other languages.
"""
