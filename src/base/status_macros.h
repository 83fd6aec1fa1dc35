// Early return on errors.
#pragma once

#include "shardpull/status.h"

#define SHARDPULL_CONCAT_(a, b) a##b
#define SHARDPULL_CONCAT(a, b) SHARDPULL_CONCAT_(a, b)

// Returns the Status of `expr` from the enclosing function unless it is OK.
#define SHARDPULL_RETURN_IF_ERROR(expr)                 \
  do {                                                  \
    ::shardpull::Status shardpull_status_ = (expr);     \
    if (!shardpull_status_.ok()) return shardpull_status_; \
  } while (false)

// Evaluates a Result; returns its Status from the enclosing function, or assigns its value to `lhs`.
#define SHARDPULL_ASSIGN_OR_RETURN(lhs, expr) \
  SHARDPULL_ASSIGN_OR_RETURN_(SHARDPULL_CONCAT(shardpull_result_, __LINE__), lhs, expr)
#define SHARDPULL_ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                                \
  if (!tmp.ok()) return tmp.status();               \
  lhs = std::move(tmp).value()
