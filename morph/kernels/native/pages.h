// Keys and values in unit pages: K then V, each [page_tokens][dim], one kv head per page.
#pragma once

#include "simd.h"

namespace morph {

struct Pages {
    const char* storage;
    int64_t unit_bytes;
    const int32_t* units;  // page p of this kv head is units[p]
    uint32_t page_tokens;  // 32 bits: divided by once per token
    long dim;
    long item;  // bytes of an element: 2 or 4

    const char* key(long token) const { return at(static_cast<uint32_t>(token), 0); }
    const char* value(long token) const { return at(static_cast<uint32_t>(token), 1); }
    // Tokens from `token` on that follow each other in memory.
    long run(long token) const { return page_tokens - static_cast<uint32_t>(token) % page_tokens; }

  private:
    const char* at(uint32_t token, uint32_t which) const {
        const char* unit = storage + static_cast<int64_t>(units[token / page_tokens]) * unit_bytes;
        return unit + static_cast<long>(which * page_tokens + token % page_tokens) * dim * item;
    }
};

}  // namespace morph
