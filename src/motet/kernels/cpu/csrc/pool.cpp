#include "pool.hpp"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace motet {
namespace {

constexpr int SPINS = 20000;  // about 50 microseconds before a thread sleeps

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

thread_local bool within = false;  // a part that shares work of its own does so alone

// Threads of one process. It is never destroyed: threads may wait in it when the process ends.
class Threads {
 public:
    explicit Threads(pid_t owner) : owner(owner) {}

    void run(int64_t threads, int64_t parts, Work work, void* context) {
        std::lock_guard<std::mutex> turn(turns_);
        try {
            for (; n_threads_ < threads - 1; n_threads_++)
                std::thread([this, index = n_threads_, seen = generation_.load()] { serve(index, seen); }).detach();
        } catch (const std::system_error&) {  // no more threads are to be had: those that are here do it
        }
        work_ = work;
        context_ = context;
        helpers_.store(threads - 1, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        tickets_.store(static_cast<uint64_t>(parts) << 32, std::memory_order_release);
        {
            std::lock_guard<std::mutex> lock(sleep_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        if (asleep_.load()) wake_.notify_all();
        within = true;
        take_parts();
        within = false;
        for (int i = 0; i < SPINS && done_.load(std::memory_order_acquire) < parts; i++) pause();
        if (done_.load(std::memory_order_acquire) < parts) {  // a thread that is to finish it may need this core
            std::unique_lock<std::mutex> lock(sleep_);
            waits_ = true;
            finished_.wait(lock, [&] { return done_.load() >= parts; });
            waits_ = false;
        }
        if (fault_) std::rethrow_exception(std::exchange(fault_, nullptr));
    }

    const pid_t owner;

 private:
    // A ticket says how many parts there are and which one is next. Who holds one that is left keeps the call open.
    void take_parts() {
        for (;;) {
            const uint64_t ticket = tickets_.fetch_add(1, std::memory_order_acq_rel);
            if ((ticket & 0xffffffffu) >= ticket >> 32) return;
            try {
                FlushDenormals flush;
                work_(context_, static_cast<int64_t>(ticket & 0xffffffffu));
            } catch (...) {  // `run` says it once nobody uses the context any more
                std::lock_guard<std::mutex> lock(sleep_);
                fault_ = std::current_exception();
            }
            const bool last = done_.fetch_add(1) + 1 == static_cast<int64_t>(ticket >> 32);
            if (!last || !waits_) continue;
            std::lock_guard<std::mutex> lock(sleep_);
            finished_.notify_one();
        }
    }

    void serve(int64_t index, uint64_t seen) {
        within = true;
        for (;;) {
            for (int i = 0; i < SPINS && generation_.load(std::memory_order_acquire) == seen; i++) pause();
            if (generation_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(sleep_);
                asleep_.fetch_add(1);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
                asleep_.fetch_sub(1);
            }
            seen = generation_.load(std::memory_order_acquire);
            if (index < helpers_.load(std::memory_order_relaxed)) take_parts();
        }
    }

    std::mutex turns_, sleep_;
    std::condition_variable wake_, finished_;
    std::atomic<bool> waits_{false};
    std::atomic<uint64_t> generation_{0}, tickets_{0};
    std::atomic<int64_t> done_{0}, asleep_{0}, helpers_{0};
    int64_t n_threads_ = 0;
    Work work_ = nullptr;
    void* context_ = nullptr;
    std::exception_ptr fault_;
};

std::atomic<Threads*> pool{nullptr};

// Of this process: after a fork the parent's threads are not here, and its locks may be held.
Threads& threads_here() {
    const pid_t here = getpid();
    Threads* held = pool.load(std::memory_order_acquire);
    while (!held || held->owner != here) {
        Threads* fresh = new Threads(here);
        if (pool.compare_exchange_strong(held, fresh)) return *fresh;
        delete fresh;
    }
    return *held;
}

}  // namespace

void run_parts(int64_t threads, int64_t parts, Work work, void* context) {
    if (threads <= 1 || parts <= 1 || within) {
        FlushDenormals flush;
        for (int64_t part = 0; part < parts; part++) work(context, part);
        return;
    }
    threads_here().run(threads, parts, work, context);
}

}  // namespace motet
