// What the library exports. It is compiled with hidden symbols, so that a program or library that links the
// archive has nothing of its insides, and a shared build offers the public API and nothing else.
#pragma once

// Before a function, and between `class` or `struct` and the name of one whose members are defined in the
// library.
#define SHARDPULL_API [[gnu::visibility("default")]]
// Within such a class, before the name of its implementation.
#define SHARDPULL_HIDDEN [[gnu::visibility("hidden")]]
