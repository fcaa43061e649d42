#include "team.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace {

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleep while `word` is `value`, and wake all sleepers. std::atomic's own wait yields before it sleeps. If another process wants
// the core, a thread that yields gets it back after that process's time slice, a thread that sleeps as soon as it is woken.
#if defined(__linux__)
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) { word.wait(value); }
void wake_all(std::atomic<uint32_t>& word) { word.notify_all(); }
#endif

// How long a waiting member spins before it sleeps. Waking one takes 50 to 100 us on some virtual machines, longer than a
// phase of a small model: members that sleep at every barrier then wake one after the other, and none works beside another.
constexpr std::chrono::microseconds SPIN{200};
// The same while other threads use the cores: a member that sleeps leaves its core to one that waits.
constexpr std::chrono::microseconds CROWDED_SPIN{20};
constexpr int PAUSES_PER_LOOK_AT_THE_CLOCK = 16;
constexpr size_t ALIGNMENT = 64;

// How long the thread that makes it waits for cores that run something else, as Linux counts it.
class CoreWaits {
  public:
#if defined(__linux__)
    ~CoreWaits() { close(file_); }
#endif
    // Whether it waited for more than a quarter of the latest time in which it wanted to run. True if that is not known.
    bool are_long() {
        const auto now = std::chrono::steady_clock::now();
        if (now >= next_look_) {
            next_look_ = now + std::chrono::milliseconds(10);
            look();
        }
        return are_long_;
    }

  private:
    void look() {
#if defined(__linux__)
        char text[64];
        const ssize_t size = pread(file_, text, sizeof text - 1, 0);
        text[size > 0 ? size : 0] = 0;
        long long ran, waited;  // ns since the thread began
        if (std::sscanf(text, "%lld %lld", &ran, &waited) != 2) return;
        are_long_ = 3 * (waited - waited_) > ran - ran_;
        ran_ = ran;
        waited_ = waited;
#endif
    }

#if defined(__linux__)
    const int file_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
#endif
    std::chrono::steady_clock::time_point next_look_{};
    long long ran_ = 0, waited_ = 0;
    bool are_long_ = true;
};

}  // namespace

void Buffer::reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(memory_);
    size_ = (bytes + bytes / 4 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    memory_ = std::aligned_alloc(ALIGNMENT, size_);
    if (!memory_) std::abort();  // out of memory: the rank ends, as Python's would
}

void kv_team::start_threads() {
    for (int i = 1; i < size_; ++i) std::thread([this, i] { serve(i); }).detach();
}

void kv_team::start(Function function, const void* argument) {
    Worker worker{*this, 0, callers_generation_};
    if (size_ == 1) return function(argument, worker);
    function_ = function;
    argument_ = argument;
    look_at_cores(caller_is_crowded_);
    barrier(callers_generation_);
    function(argument, worker);
    barrier(callers_generation_);
}

void kv_team::serve(int index) {
    uint32_t generation = 0;
    bool is_crowded = true;
    Worker worker{*this, index, generation};
    for (;;) {
        barrier(generation);
        look_at_cores(is_crowded);
        function_(argument_, worker);
        barrier(generation);
    }
}

void kv_team::look_at_cores(bool& is_crowded) {
    thread_local CoreWaits waits;
    const bool was_crowded = is_crowded;
    is_crowded = waits.are_long();
    if (is_crowded != was_crowded) crowded_.fetch_add(is_crowded ? 1 : -1, std::memory_order_relaxed);
}

void kv_team::barrier(uint32_t& generation) {
    const uint32_t current = generation++;
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        claimed_[current & 1].store(0, std::memory_order_relaxed);
        generation_.store(current + 1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) > 0) wake_all(generation_);
        return;
    }
    const auto spin = crowded_.load(std::memory_order_relaxed) ? CROWDED_SPIN : SPIN;
    const auto deadline = std::chrono::steady_clock::now() + spin;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK_AT_THE_CLOCK; ++i) {
            if (generation_.load(std::memory_order_acquire) != current) return;
            pause_briefly();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    while (generation_.load(std::memory_order_seq_cst) == current) sleep_while(generation_, current);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
}
