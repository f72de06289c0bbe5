// Threads that share the parts of a call. They spin for a moment after a call, then sleep.
#pragma once
#include <cstdint>

namespace motet {

using Work = void (*)(void* context, int64_t part);

// Runs work(context, part) for each part once, on this thread and others, and returns when all are done. `threads` 1 runs
// them here, in order. Calls from several threads take turns. After a fork the child makes threads of its own.
void run_parts(int64_t threads, int64_t parts, Work work, void* context);

template <class F>
void parallel(int64_t threads, int64_t parts, F&& f) {
    auto call = [](void* context, int64_t part) { (*static_cast<F*>(context))(part); };
    run_parts(threads, parts, call, &f);
}

}  // namespace motet
