"""On the worker's host: what starts, watches and ends the processes of ranks.

`warm`    finds the host's warm server, or starts it
`server`  the warm server: torch is imported once, each rank is a fork of it
`environment` the variables of a rank
`network` the interfaces of this machine
`rendezvous` where the ranks meet
`relay`   the Dask task of one rank: starts it, passes its records on, says how it ended
`farewell` lets ranks finish when their worker is shut down
`mailbox` what the client tells a rank's relay while it runs
`spool`   files on their way from ranks to the client
"""
