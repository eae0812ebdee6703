"""The processes of mounts: started, supervised, handed over, found again, ended."""
