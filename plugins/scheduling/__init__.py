"""The "scheduling" slot: `scheduling.fcfs` and `scheduling.priority`."""
