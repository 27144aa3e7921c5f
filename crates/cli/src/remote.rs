//! The server that a command talks to.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use hapax::core::store::SharedStore;
use hapax_client::{Client, Token};

use crate::output::Output;
use crate::store::{Store, StoreOptions, is_store};

/// The variable with the token.
const TOKEN: &str = "HAPAX_TOKEN";

/// The server's address, and the output format.
#[derive(Debug, Clone, Args)]
pub struct Remote {
    /// The server; or a store itself: postgres://HOST/DATABASE, redis://HOST, or, while no server runs, embedded:PATH. A server with keys also needs a token, ID:SECRET in
    /// the variable HAPAX_TOKEN.
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "HAPAX_ENDPOINT",
        hide_env_values = true, // it may hold a key
        default_value = "http://127.0.0.1:9324"
    )]
    pub endpoint: String,
    /// File with the token, instead of HAPAX_TOKEN.
    #[arg(long, global = true, value_name = "FILE", env = "HAPAX_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Prints JSON.
    #[arg(long, global = true)]
    json: bool,
}

impl Remote {
    /// A server or store by its URL, with the token from the environment.
    pub fn at(endpoint: &str) -> Self {
        Self { endpoint: endpoint.to_owned(), token_file: None, json: false }
    }

    /// The output format.
    pub fn output(&self) -> Output {
        Output::new(self.json)
    }

    /// Whether the endpoint is a store itself rather than a server.
    pub fn is_store(&self) -> bool {
        is_store(&self.endpoint)
    }

    /// Connects to the server, or opens the store.
    pub async fn connect(&self) -> anyhow::Result<SharedStore> {
        if self.is_store() {
            return Ok(Store::open_existing(&self.endpoint, StoreOptions::default()).await?.admin().clone());
        }
        Ok(Arc::new(self.client().await?))
    }

    /// A client of the server.
    pub async fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect(&self.endpoint, self.token()?).await?)
    }

    fn token(&self) -> anyhow::Result<Option<Token>> {
        let token = match &self.token_file {
            Some(file) => Some(
                std::fs::read_to_string(file).with_context(|| format!("token file {}", file.display()))?,
            ),
            None => std::env::var(TOKEN).ok(),
        };
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        match token {
            Some(token) if !token.contains(':') => bail!("the token has no colon; write ID:SECRET"),
            token => Ok(token.map(Token::new)),
        }
    }

    /// The user's name, for the audit.
    pub fn user_name() -> String {
        let user = std::env::var("USER").or_else(|_| std::env::var("LOGNAME"));
        user.map_or_else(|_| "hapax CLI".to_owned(), |user| format!("{user} (hapax CLI)"))
    }
}
