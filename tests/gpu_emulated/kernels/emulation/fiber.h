// A stack and a context to switch to. AddressSanitizer and ThreadSanitizer are told about every switch.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <memory>

#if defined(EMULATED_ASAN)
#include <sanitizer/common_interface_defs.h>
#elif defined(EMULATED_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace emulated {

constexpr size_t kStackBytes = 128 << 10;

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  ~Fiber() { end(); }

  // Prepares a run of `entry` from its beginning; a previous run is abandoned.
  void begin(void (*entry)()) {
    end();
    if (!stack_) stack_.reset(new std::byte[kStackBytes]);
    getcontext(&context_);
    context_.uc_stack = {stack_.get(), 0, kStackBytes};
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#if defined(EMULATED_TSAN)
    tsan_ = __tsan_create_fiber(0);  // what its creator did happens before it; fibers are concurrent with each other
#endif
  }

  void end() {
#if defined(EMULATED_TSAN)
    if (tsan_ != nullptr) __tsan_destroy_fiber(tsan_);
    tsan_ = nullptr;
#endif
  }

  // Runs the fiber until it calls pause().
  void resume() {
#if defined(EMULATED_ASAN)
    __sanitizer_start_switch_fiber(&outside_fake_stack_, stack_.get(), kStackBytes);
#elif defined(EMULATED_TSAN)
    outside_tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_, __tsan_switch_to_fiber_no_sync);
#endif
    swapcontext(&outside_, &context_);
#if defined(EMULATED_ASAN)
    __sanitizer_finish_switch_fiber(outside_fake_stack_, nullptr, nullptr);
#endif
  }

  // Called by the fiber: returns when it is resumed, never if `is_last`.
  void pause(bool is_last) {
#if defined(EMULATED_ASAN)
    __sanitizer_start_switch_fiber(is_last ? nullptr : &fake_stack_, outside_stack_, outside_bytes_);
#elif defined(EMULATED_TSAN)
    __tsan_switch_to_fiber(outside_tsan_, __tsan_switch_to_fiber_no_sync);
#endif
    (void)is_last;
    swapcontext(&context_, &outside_);
    entered();
  }

  // Called by the fiber after every switch to it.
  void entered() {
#if defined(EMULATED_ASAN)
    __sanitizer_finish_switch_fiber(fake_stack_, &outside_stack_, &outside_bytes_);
#endif
  }

 private:
  ucontext_t context_, outside_;
  std::unique_ptr<std::byte[]> stack_;
#if defined(EMULATED_ASAN)
  void *fake_stack_ = nullptr, *outside_fake_stack_ = nullptr;
  const void* outside_stack_ = nullptr;
  size_t outside_bytes_ = 0;
#elif defined(EMULATED_TSAN)
  void *tsan_ = nullptr, *outside_tsan_ = nullptr;
#endif
};

}  // namespace emulated
