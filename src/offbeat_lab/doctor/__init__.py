"""What is here, what the network between the workers does, and what that means for the choice of a
strategy.
"""

from offbeat_lab.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
