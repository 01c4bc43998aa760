"""Ranks that compute one model together: a mesh, over which they exchange tensors.

In: a rank, the number of ranks, and where they meet. Out: collectives on tensors. Nothing here knows models, plans or
requests.
"""

from penstock.parallel.mesh import Mesh, OneRank, open_mesh
from penstock.parallel.shared import Segment

__all__ = ["Mesh", "OneRank", "Segment", "open_mesh"]
