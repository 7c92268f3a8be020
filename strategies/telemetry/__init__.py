"""What a run looks like while it goes: figures of steps and of the machine, and alerts where they look wrong."""
