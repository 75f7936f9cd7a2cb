"""Every kind of cluster by one key, `cluster=…`.

manager.py     what holds for any Dask class: arguments, size, keeping, ending
local.py gateway.py saturn.py ssh.py slurm.py kubernetes.py    what one kind needs besides; nothing else knows of it
remote.py connection.py    a scheduler that is there already: reaching it, or saying why not
waiting.py     workers that come late, leave, or don't come
lease.py       a cluster ends also when the client that started it was killed
"""
