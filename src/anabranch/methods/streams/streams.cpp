// The C functions of speculative streams; kernels.py calls them. For kinds and return values see interface.cpp.

#include "draft.h"
#include "interface.h"
#include "trail.h"

extern "C" {

// The number of nodes of the tree of one sequence, from its stream states [depth, D]; see DraftLevels::Tree.
int anabranch_draft(int kind, void* runner, const DraftConfig* config, const void* states, int64_t root, int64_t* tokens,
                    int64_t* parents, int64_t* sources, float* joints) {
  return guarded([&] {
    require(runner != nullptr && config != nullptr && states != nullptr && tokens != nullptr && parents != nullptr &&
                sources != nullptr && joints != nullptr,
            "a pointer is null");
    require(in_range(kind, BF16, FLOATS), "unknown kind of draft");
    check(kind, *config, root);
    return with_row_type(kind, [&](auto row_type) {
      using T = typename decltype(row_type)::type;
      Drafter<T> drafter(ready(runner), *config, static_cast<const Storage<T>*>(states), root);
      return drafter.run({tokens, parents, sources, joints});
    });
  });
}

// runs streams from the main rows that they trail to their final states; see ``trail``
int anabranch_trail(int kind, void* runner, const Shape* shape, const Layer* layers, int count, const RaggedBatch* batch,
                    const TrailEntry* entry, void* states) {
  return guarded([&] {
    check(kind, runner, shape, layers, count, batch);
    require(entry != nullptr && states != nullptr, "a pointer is null");
    check(kind, *shape, *batch, *entry);
    with_row_type(kind, [&](auto row_type) {
      using T = typename decltype(row_type)::type;
      trail<T>(ready(runner), *shape, layers, count, *batch, *entry, static_cast<Storage<T>*>(states));
    });
    return DONE;
  });
}

}  // extern "C"
