// Whether a thread has to wait for cores that run something else.
#pragma once
#include <chrono>
#include <cstdio>
#if defined(__linux__)
#include <fcntl.h>
#include <unistd.h>
#endif

// Of the thread that makes it, as Linux counts it.
class CoreWaits {
  public:
#if defined(__linux__)
    CoreWaits() : file_(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}
    ~CoreWaits() {
        if (file_ >= 0) close(file_);
    }
#endif
    CoreWaits(const CoreWaits&) = delete;

    // Whether it waited for more than a quarter of the time in which it wanted to run, lately. True if that is not known.
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

    int file_ = -1;
    std::chrono::steady_clock::time_point next_look_{};
    long long ran_ = 0, waited_ = 0;
    bool are_long_ = true;
};
