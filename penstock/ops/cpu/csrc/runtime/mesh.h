// Ranks of one machine: processes that share a segment of memory, in which they meet and leave data for each other.
#pragma once

#include <cstdint>

namespace penstock {

struct Mesh;

constexpr int32_t kMeshFailed = 2;  // what a call on a mesh returns once a rank is gone, or the wait was too long

int mesh_rank(const Mesh* mesh);
int mesh_size(const Mesh* mesh);
int64_t mesh_slot_bytes(const Mesh* mesh);

// A meeting: each rank writes its own slot, meets, and reads the slots of all until it meets again.
char* mesh_own_slot(Mesh* mesh);
int32_t mesh_meet(Mesh* mesh);
const char* mesh_slot(const Mesh* mesh, int64_t rank);

}  // namespace penstock
