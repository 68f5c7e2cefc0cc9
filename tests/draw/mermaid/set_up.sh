#!/bin/sh
# Puts Mermaid (from npm, as package-lock.json pins it) into the folder that is named, and installs Chromium and npm by
# Debian's packages where they are missing. Where that is not possible, it says so and succeeds: the tests then skip.
set -eu
folder=$1
here=$(cd "$(dirname "$0")" && pwd)

install() {
    if ! command -v apt-get >/dev/null; then
        echo "there is no apt-get to install $*; install them by hand"
    elif [ "$(id -u)" = 0 ]; then
        apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "$@" >/dev/null
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        sudo apt-get -qq update && sudo apt-get -qq install --no-install-recommends "$@" >/dev/null
    else
        echo "apt-get needs root to install $*; run: sudo apt-get install $*"
    fi
}

mkdir -p "$folder"
command -v chromium >/dev/null || install chromium fonts-dejavu-core fonts-wqy-zenhei || echo "Chromium could not be installed"
if ! cmp -s "$here/package-lock.json" "$folder/package-lock.json"; then
    command -v npm >/dev/null || install npm || echo "npm could not be installed"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cp "$here/package.json" "$here/package-lock.json" "$work"
    if (cd "$work" && npm ci --silent --ignore-scripts --no-audit --no-fund); then
        for package in mermaid mermaid-11; do
            cp "$work/node_modules/$package/dist/mermaid.min.js" "$folder/$package.js"
        done
        cp "$here/package-lock.json" "$folder/package-lock.json" # last: it says that the rest is there
    else
        echo "npm could not fetch Mermaid"
    fi
fi
