// A team of threads that run the same function and meet at barriers. Compiled once; used by all variants.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

// One member's view of a running function.
struct Worker;

// Scratch memory of a team that grows and stays. Contents are undefined after `reserve`.
class Buffer {
  public:
    void reserve(size_t bytes);
    template <class T>
    T* as() const {
        return static_cast<T*>(memory_);
    }

  private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

// Lasts as long as the process: its threads never end.
struct kv_team {
    explicit kv_team(int threads) : size_(threads), crowded_(threads) {}

    // Starts the other members. Raises: std::system_error. Those that have started stay, even if a later one cannot.
    void start_threads();

    // Calls f(worker) on every member; returns when all have returned.
    template <class F>
    void run(const F& f) {
        start([](const void* f, Worker& w) { (*static_cast<const F*>(f))(w); }, &f);
    }

    int size() const { return size_; }

    enum Use {
        NORMED, QKV, QUERIES, ATTENDED, INNER, CODES, SUMS, PARTIAL, ATTENTION_PANELS, ATTENTION_PARTIALS, RESIDUAL, DELTA, FINAL,
        EXPERT_PLAN, MIXTURE_IN, MIXTURE_OUT, ROUTER_SCORES, ROUTER_CHOICE, NUM_USES
    };
    Buffer buffers[NUM_USES];  // reserved by the caller's thread, outside of run()

  private:
    friend struct Worker;
    using Function = void (*)(const void*, Worker&);
    void start(Function, const void*);
    [[noreturn]] void serve(int index);
    void barrier(uint32_t& generation);
    void look_at_cores(bool& is_crowded);

    int size_;
    Function function_ = nullptr;
    const void* argument_ = nullptr;
    uint32_t callers_generation_ = 0;
    bool caller_is_crowded_ = true;
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> crowded_;  // members that wait long for cores
    alignas(64) std::atomic<int> claimed_[2]{};
};

struct Worker {
    kv_team& team;
    int index;
    uint32_t& generation;
    // If not null, this member works without the others, and this many bytes of each buffer are its own.
    const size_t* own_bytes = nullptr;

    void barrier() { team.barrier(generation); }

    template <class T>
    T* scratch(kv_team::Use use) const {
        char* memory = team.buffers[use].as<char>();
        return reinterpret_cast<T*>(own_bytes ? memory + own_bytes[use] * size_t(index) : memory);
    }

    // Calls f(i) for every i below n, each on one member, in any order; then all members meet.
    template <class F>
    void for_each(int n, const F& f) {
        if (team.size() == 1 || own_bytes) {
            for (int i = 0; i < n; ++i) f(i);
            return;
        }
        // The counter of this phase. The other one was reset at the last barrier.
        std::atomic<int>& next = team.claimed_[generation & 1];
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
        barrier();
    }
};
