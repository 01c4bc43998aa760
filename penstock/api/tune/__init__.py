"""Search the settings that suit a workload on this machine, by running it.

In: a function that runs a workload under options. Out: options that are better by more than the noise of the runs.
Only settings that change no answer are tried.
"""
