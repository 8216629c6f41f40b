// Kernel calls that are written down to be made later, and again.
#pragma once
#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace nb = nanobind;

// Kernel calls with their arguments, to be run again on whatever their tensors hold by then. It owns no tensor.
struct Tape {
  std::vector<std::function<void()>> calls;

  size_t size() const { return calls.size(); }

  void run(size_t begin, size_t end) const {
    if (begin > end || end > calls.size()) throw std::out_of_range("the tape has " + std::to_string(calls.size()) + " calls");
    nb::gil_scoped_release release;
    for (size_t i = begin; i < end; ++i) calls[i]();
  }
};

// Where kernel calls go: to the processor at once, or while there is a tape onto that. A tape is its thread's alone:
// blocks may be on their way to other memory while a step is captured.
struct Desk {
  std::shared_ptr<Tape> tape;  // read and set by who holds the interpreter
  std::thread::id writer;

  void start() {
    if (tape) throw std::runtime_error("a second tape cannot be part of a captured step");
    tape = std::make_shared<Tape>();
    writer = std::this_thread::get_id();
  }
  bool taping() const { return tape && writer == std::this_thread::get_id(); }

  template <class F> void put(F&& call) const {
    if (taping()) {
      tape->calls.emplace_back(std::forward<F>(call));
      return;
    }
    nb::gil_scoped_release release;
    call();
  }

  void refuse(const char* what) const {
    if (taping()) throw std::runtime_error(std::string(what) + " cannot be part of a captured step");
  }
};
